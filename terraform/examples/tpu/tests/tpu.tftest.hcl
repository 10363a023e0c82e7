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

mock_provider "google-beta" {
  mock_resource "google_tpu_v2_vm" {
    defaults = {
      network_endpoints = [
        { ip_address = "10.0.0.2", port = 8470, access_config = [] },
        { ip_address = "10.0.0.3", port = 8470, access_config = [] },
      ]
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
    condition     = output.launch.hosts == ["ada@10.0.0.2", "ada@10.0.0.3"] && output.launch.addresses == tolist(["10.0.0.2", "10.0.0.3"])
    error_message = "the hosts are not in the order of the workers"
  }
  assert {
    condition     = output.launch.kind == "ssh" && output.launch.ready == "/var/lib/dtrain/ready" && output.launch.runs == "/mnt/dtrain"
    error_message = "up cannot wait for the hosts"
  }
  assert {
    condition     = length(split("\n", output.setup)) == 4
    error_message = "a command registers the key, and one for each host records its host key"
  }
}
