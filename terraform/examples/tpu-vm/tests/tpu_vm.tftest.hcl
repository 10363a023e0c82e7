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

mock_provider "google-beta" {
  mock_resource "google_tpu_v2_vm" {
    defaults = {
      network_endpoints = [{ ip_address = "10.0.0.2", port = 8470, access_config = [] }]
    }
  }
}

run "its_outputs_are_what_launch_takes" {
  command = apply

  assert {
    condition     = output.launch == { kind = "ssh", hosts = tolist(["10.0.0.2"]) }
    error_message = "fields of the launch section"
  }
}
