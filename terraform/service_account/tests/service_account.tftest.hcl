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
  name    = "dtrain"
}

run "it_may_do_little" {
  command = apply
  assert {
    condition     = toset([for role in google_project_iam_member.roles : role.role]) == toset(["roles/logging.logWriter", "roles/monitoring.metricWriter"])
    error_message = "logs and metrics only"
  }
  assert {
    condition     = length(google_artifact_registry_repository_iam_member.images) == 0
    error_message = "an unexpected role"
  }
  assert {
    condition     = output.member == "serviceAccount:dtrain@my-project.iam.gserviceaccount.com"
    error_message = "the name in IAM"
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
