mock_provider "google" {
  mock_data "google_storage_bucket" {
    defaults = {
      location               = "US-EAST5"
      hierarchical_namespace = [{ enabled = true }]
    }
  }
}

variables {
  project = "my-project"
  name    = "my-runs"
  stack   = "dtrain-a"
  region  = "us-east5"
  writers = { hosts = "serviceAccount:dtrain@my-project.iam.gserviceaccount.com" }
  files   = { lock = "main.tf" }
  labels  = { owner = "ada" }
}

run "it_is_private_and_destroy_leaves_it" {
  command = plan
  assert {
    condition     = google_storage_bucket.this[0].public_access_prevention == "enforced" && google_storage_bucket.this[0].uniform_bucket_level_access
    error_message = "it can be public"
  }
  assert {
    condition     = google_storage_bucket.this[0].deletion_policy == "ABANDON" && !google_storage_bucket.this[0].force_destroy
    error_message = "destroy deletes the runs"
  }
  assert {
    condition     = google_storage_bucket.this[0].hierarchical_namespace[0].enabled
    error_message = "a folder is not renamed in one step"
  }
  assert {
    condition     = google_storage_bucket.this[0].soft_delete_policy[0].retention_duration_seconds == 0
    error_message = "deleted checkpoints are billed"
  }
  assert {
    condition     = google_storage_bucket.this[0].labels == tomap({ owner = "ada", tool = "dtrain" })
    error_message = "its cost has no owner"
  }
}

run "hosts_write_runs_and_read_launch" {
  command = plan
  assert {
    condition     = google_storage_bucket_iam_member.writers["hosts"].role == "roles/storage.objectUser" && startswith(google_storage_bucket_iam_member.writers["hosts"].condition[0].expression, "!resource.name.startsWith('projects/_/buckets/my-runs/objects/launch/') && !")
    error_message = "hosts may write what they install"
  }
  assert {
    condition     = google_storage_bucket_iam_member.launch_readers["hosts"].role == "roles/storage.objectViewer" && google_storage_bucket_iam_member.launch_readers["hosts"].condition[0].expression == "resource.name.startsWith('projects/_/buckets/my-runs/objects/launch/')"
    error_message = "hosts cannot read what they install"
  }
  assert {
    condition     = can(regex("^gs://my-runs/launch/dtrain-a/[0-9a-f]{12}/main.tf$", output.files["lock"]))
    error_message = "the path does not name the content"
  }
}

run "one_that_is_there" {
  command = plan
  variables {
    create = false
  }
  assert {
    condition     = length(google_storage_bucket.this) == 0 && output.bucket != null
    error_message = "it would be created again"
  }
}

run "one_of_another_region_is_refused" {
  command = plan
  variables {
    create = false
    region = "us-central1"
  }
  expect_failures = [data.google_storage_bucket.existing[0]]
}

run "the_public_is_no_writer" {
  command = plan
  variables {
    writers = { all = "allUsers" }
  }
  expect_failures = [var.writers]
}

run "a_url_is_no_name" {
  command = plan
  variables {
    name = "gs://my-runs"
  }
  expect_failures = [var.name]
}

run "soft_delete_has_a_minimum" {
  command = plan
  variables {
    soft_delete_days = 3
  }
  expect_failures = [var.soft_delete_days]
}
