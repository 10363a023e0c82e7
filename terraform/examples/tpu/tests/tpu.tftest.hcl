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
    condition = output.launch == {
      kind       = "queued"
      on         = "v6e-16"
      spot       = true
      project    = "my-project"
      zones      = ["us-east5-b"]
      bucket     = "my-runs"
      network    = "dtrain"
      subnetwork = "dtrain"
      account    = "dtrain@my-project.iam.gserviceaccount.com"
    }
    error_message = "fields of the launch section"
  }
}

run "other_ways_are_refused" {
  command = plan
  variables {
    kind = "tpu"
  }
  expect_failures = [var.kind]
}
