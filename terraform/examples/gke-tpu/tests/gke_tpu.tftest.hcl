mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = {
      email = "dtrain@my-project.iam.gserviceaccount.com"
    }
  }
}

variables {
  project   = "my-project"
  bucket    = "my-runs"
  operators = { office = "203.0.113.0/24" }
}

run "its_outputs_are_what_launch_takes" {
  command = apply

  assert {
    condition     = output.launch == { kind = "gke", bucket = "my-runs", context = "gke_my-project_us-east5_dtrain", spot = true, slices = 1 }
    error_message = "fields of the launch section"
  }
}
