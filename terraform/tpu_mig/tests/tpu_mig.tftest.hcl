mock_provider "google" {}

variables {
  project         = "my-project"
  zone            = "us-east5-b"
  network         = "projects/my-project/global/networks/dtrain"
  subnetwork      = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account = "dtrain@my-project.iam.gserviceaccount.com"
  machine         = "ct6e-standard-4t"
  hosts           = 4
  topology        = "4x4"
}

run "hosts_are_one_slice" {
  command = apply
  assert {
    condition     = google_compute_resource_policy.slice[0].workload_policy[0].accelerator_topology == "4x4"
    error_message = "the hosts are not joined"
  }
  assert {
    condition     = google_compute_resource_policy.slice[0].region == "us-east5"
    error_message = "the policy lies in another region than its zone"
  }
  assert {
    condition     = google_compute_instance_group_manager.slice.target_size == 4
    error_message = "there are not four hosts"
  }
  assert {
    condition     = length(google_compute_instance_template.host.network_interface[0].access_config) == 0
    error_message = "they can be reached from the internet"
  }
}

run "one_host_needs_no_topology" {
  command = apply
  variables {
    machine  = "ct6e-standard-8t"
    hosts    = 1
    topology = null
  }
  assert {
    condition     = length(google_compute_resource_policy.slice) == 0
    error_message = "one host has a topology"
  }
}

run "spot_is_stopped_not_restarted" {
  command = apply
  variables {
    spot = true
  }
  assert {
    condition     = google_compute_instance_template.host.scheduling[0].provisioning_model == "SPOT" && google_compute_instance_template.host.scheduling[0].automatic_restart == false
    error_message = "it is not spot"
  }
}

run "several_hosts_without_topology_are_refused" {
  command = plan
  variables {
    topology = null
  }
  expect_failures = [var.topology]
}
