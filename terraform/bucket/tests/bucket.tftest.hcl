mock_provider "google" {}

variables {
  project  = "my-project"
  name     = "my-runs"
  location = "us-east5"
  writers  = { training = "serviceAccount:dtrain@my-project.iam.gserviceaccount.com" }
}

run "it_is_private_and_hard_to_lose" {
  command = plan

  assert {
    condition     = google_storage_bucket.this.public_access_prevention == "enforced" && google_storage_bucket.this.uniform_bucket_level_access
    error_message = "nobody outside may read it"
  }
  assert {
    condition     = google_storage_bucket.this.force_destroy == false
    error_message = "a bucket that holds runs must not be destroyed"
  }
  assert {
    condition     = google_storage_bucket.this.soft_delete_policy[0].retention_duration_seconds == 604800
    error_message = "what was deleted is kept for a week"
  }
  assert {
    condition     = google_storage_bucket.this.hierarchical_namespace[0].enabled
    error_message = "without it a folder is not renamed in one step"
  }
  assert {
    condition     = google_storage_bucket_iam_member.writers["training"].role == "roles/storage.objectUser"
    error_message = "writers may use objects, and nothing else"
  }
}

run "the_world_is_no_writer" {
  command = plan
  variables {
    writers = { all = "allUsers" }
  }
  expect_failures = [var.writers]
}

run "an_address_is_no_name" {
  command = plan
  variables {
    name = "gs://my-runs"
  }
  expect_failures = [var.name]
}
