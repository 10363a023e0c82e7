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
}

variables {
  project = "my-project"
  bucket  = "my-runs"
  owner   = "ada"
  user    = "ada"
  wheel   = "../tests/dtrain-0.1.0-py3-none-any.whl"
  lock    = "../tests/lock.txt"
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
    condition     = output.launch.hours == 23.5 && can(regex("^gs://my-runs/launch/[^/]+/[0-9a-f]{12}/dtrain-0.1.0-py3-none-any.whl$", output.launch.wheel))
    error_message = "the limit of the run and the wheel of its hosts"
  }
  assert {
    condition     = output.launch.hosts == ["ada@dtrain-gpu-0", "ada@dtrain-gpu-1"] && length(output.launch.addresses) == 2
    error_message = "the hosts are not in the order of their ranks"
  }
  assert {
    condition     = output.launch.proxy == "gcloud compute start-iap-tunnel %h 22 --listen-on-stdin --zone us-east5-a --project my-project"
    error_message = "ssh does not go through the tunnel"
  }
}
