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
  project          = "my-project"
  zone             = "us-east5-b"
  network          = "projects/my-project/global/networks/dtrain"
  subnetwork       = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account  = "dtrain@my-project.iam.gserviceaccount.com"
  accelerator_type = "v6e-8"
}

run "a_slice_has_no_address_of_the_world_and_its_own_software" {
  command = apply
  assert {
    condition     = google_tpu_v2_vm.this.network_config[0].enable_external_ips == false
    error_message = "it can be reached from the internet"
  }
  assert {
    condition     = google_tpu_v2_vm.this.runtime_version == "v2-alpha-tpuv6e"
    error_message = "it starts with the software of other chips"
  }
  assert {
    condition     = join(" ", output.hosts) == "10.0.0.2 10.0.0.3"
    error_message = "its workers are not told by rank"
  }
}

run "spot_and_reserved_exclude_each_other" {
  command = plan
  variables {
    spot     = true
    reserved = true
  }
  expect_failures = [var.reserved]
}

run "tpu7x_is_not_served_by_this_api" {
  command = plan
  variables {
    accelerator_type = "tpu7x-16"
  }
  expect_failures = [var.accelerator_type]
}
