mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = {
      name  = "projects/my-project/serviceAccounts/dtrain@my-project.iam.gserviceaccount.com"
      email = "dtrain@my-project.iam.gserviceaccount.com"
    }
  }
  mock_data "google_storage_bucket" {
    defaults = {
      location               = "US-EAST5"
      hierarchical_namespace = [{ enabled = true }]
    }
  }
  mock_data "google_project" {
    defaults = {
      number = "123456789"
    }
  }
}

variables {
  project   = "my-project"
  bucket    = "my-runs"
  owner     = "ada"
  operators = { office = "203.0.113.0/24" }
}

run "planned" {
  command = plan
}

run "second_stack" {
  command = plan
  variables {
    name          = "other-stack"
    create_bucket = false
  }
}

run "up" {
  command = apply
  assert {
    condition     = output.launch == { kind = "gke", on = "v6e-16", slices = 1, spot = true, bucket = "my-runs", context = "gke_my-project_us-east5_dtrain-gke", namespace = "default", account = "dtrain", hours = 23.5, image = "us-east5-docker.pkg.dev/my-project/dtrain-gke/dtrain:1" }
    error_message = "the launch section"
  }
  assert {
    condition     = strcontains(output.setup, "jobset/releases/download/v0.12.0/manifests.yaml") && strcontains(output.setup, "annotate serviceaccount dtrain")
    error_message = "JobSet or the account of the pods is missing"
  }
}
