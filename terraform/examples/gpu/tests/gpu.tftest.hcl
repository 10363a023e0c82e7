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
  bucket  = "my-runs"
}

run "its_outputs_are_what_launch_takes" {
  command = apply

  assert {
    condition     = output.launch.kind == "ssh" && length(output.launch.hosts) == 2
    error_message = "fields of the launch section"
  }
}
