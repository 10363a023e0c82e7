mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = {
      name  = "projects/my-project/serviceAccounts/dtrain@my-project.iam.gserviceaccount.com"
      email = "dtrain@my-project.iam.gserviceaccount.com"
    }
  }
}

variables {
  project = "my-project"
}

run "it_may_do_little" {
  command = apply

  assert {
    condition     = toset([for role in google_project_iam_member.roles : role.role]) == toset(["roles/logging.logWriter", "roles/monitoring.metricWriter"])
    error_message = "logs and metrics, and nothing else of the project"
  }
  assert {
    condition     = length(google_artifact_registry_repository_iam_member.images) == 0
    error_message = "nothing that was not asked for"
  }
  assert {
    condition     = output.member == "serviceAccount:dtrain@my-project.iam.gserviceaccount.com"
    error_message = "as IAM names it"
  }
}

run "images_are_read" {
  command = apply
  variables {
    images = { location = "us-east5", repository = "images" }
  }
  assert {
    condition     = google_artifact_registry_repository_iam_member.images[0].role == "roles/artifactregistry.reader"
    error_message = "images are read, not written"
  }
}

run "secrets_are_read_by_name_alone" {
  command = apply
  variables {
    secrets = ["WANDB_API_KEY"]
  }
  assert {
    condition     = google_project_iam_member.secrets[0].condition[0].expression == "resource.name.extract('secrets/{name}/') == 'WANDB_API_KEY'"
    error_message = "every secret of the project"
  }
}

run "keepers_may_make_machines_again" {
  command = apply
  variables {
    keeper = true
  }
  assert {
    condition     = contains([for role in google_project_iam_member.roles : role.role], "roles/tpu.admin")
    error_message = "it could not give itself back"
  }
  assert {
    condition     = google_service_account_iam_member.itself[0].role == "roles/iam.serviceAccountUser"
    error_message = "its watcher could not make machines that run as it"
  }
}

run "what_is_no_name_of_a_secret_is_refused" {
  command = plan
  variables {
    secrets = ["a' || true || 'b"]
  }
  expect_failures = [var.secrets]
}
