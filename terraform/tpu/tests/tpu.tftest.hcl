mock_provider "google" {}

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
  name             = "dtrain-a"
  labels           = { owner = "ada" }
  network          = "projects/my-project/global/networks/dtrain"
  subnetwork       = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account  = "dtrain@my-project.iam.gserviceaccount.com"
  bucket           = "my-runs"
  wheel            = "gs://my-runs/launch/0/dtrain-0.1.0-py3-none-any.whl"
  lock             = "gs://my-runs/launch/0/lock.txt"
  user             = "ada"
  accelerator_type = "v6e-8"
}

run "a_slice_is_private_and_has_its_own_image" {
  command = apply
  assert {
    condition     = !google_tpu_v2_vm.this.network_config[0].enable_external_ips
    error_message = "it has a public IP"
  }
  assert {
    condition     = google_tpu_v2_vm.this.runtime_version == "v2-alpha-tpuv6e"
    error_message = "the image is one of other chips"
  }
  assert {
    condition     = google_tpu_v2_vm.this.labels == tomap({ owner = "ada", tool = "dtrain" })
    error_message = "its cost has no owner"
  }
}

run "it_deletes_itself_after_a_day" {
  command = apply
  assert {
    condition     = strcontains(google_tpu_v2_vm.this.metadata["startup-script"], "+ 1440 * 60")
    error_message = "there is no timer"
  }
  assert {
    condition     = google_project_iam_custom_role.delete_node[0].permissions == toset(["tpu.nodes.delete"]) && google_project_iam_member.delete_node[0].role == google_project_iam_custom_role.delete_node[0].id
    error_message = "the timer may not delete the node, or may do more"
  }
  assert {
    condition     = startswith(google_project_iam_custom_role.delete_node[0].role_id, "dtrain_a_")
    error_message = "two stacks have one role"
  }
}

run "without_a_limit_it_may_do_nothing" {
  command = plan
  variables {
    hours = null
  }
  assert {
    condition     = length(google_project_iam_custom_role.delete_node) == 0 && !strcontains(google_tpu_v2_vm.this.metadata["startup-script"], "systemd-run")
    error_message = "a role without use"
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

run "tpu7x_is_not_in_this_api" {
  command = plan
  variables {
    accelerator_type = "tpu7x-16"
  }
  expect_failures = [var.accelerator_type]
}
