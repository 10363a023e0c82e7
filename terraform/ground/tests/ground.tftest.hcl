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
  region  = "us-east5"
}

run "its_parts_are_told_as_launch_takes_them" {
  command = apply

  assert {
    condition     = output.account == "dtrain@my-project.iam.gserviceaccount.com" && output.bucket == "my-runs"
    error_message = "who writes, and where"
  }
  assert {
    condition     = output.network.name == "dtrain" && output.subnetwork.name == "dtrain"
    error_message = "the names of network and subnetwork"
  }
}
