mock_provider "google" {
  mock_data "google_compute_instance_group" {
    defaults = {
      instances = ["zones/us-east5-b/instances/dtrain-slice-zzzz", "zones/us-east5-b/instances/dtrain-slice-aaaa"]
    }
  }
  mock_data "google_compute_instance" {
    defaults = {
      network_interface = [{ network_ip = "10.0.0.2" }]
    }
  }
}

variables {
  project         = "my-project"
  zone            = "us-east5-b"
  name            = "dtrain-a"
  labels          = { owner = "ada" }
  network         = "projects/my-project/global/networks/dtrain"
  subnetwork      = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account = "dtrain@my-project.iam.gserviceaccount.com"
  bucket          = "my-runs"
  wheel           = "gs://my-runs/launch/0/dtrain-0.1.0-py3-none-any.whl"
  lock            = "gs://my-runs/launch/0/lock.txt"
  user            = "ada"
  machine         = "ct6e-standard-4t"
  hosts           = 2
  topology        = "2x4"
  reservation     = "mine"
}

run "a_slice_comes_as_a_whole_and_is_not_repaired" {
  command = apply
  assert {
    condition     = google_compute_resource_policy.slice[0].workload_policy[0].accelerator_topology == "2x4" && google_compute_resource_policy.slice[0].region == "us-east5"
    error_message = "the hosts are not connected"
  }
  assert {
    condition     = google_compute_instance_group_manager.slice.target_size_policy[0].mode == "BULK" && google_compute_instance_group_manager.slice.target_size == 2
    error_message = "half a slice is billed"
  }
  assert {
    condition     = google_compute_instance_group_manager.slice.instance_lifecycle_policy[0].default_action_on_failure == "DO_NOTHING"
    error_message = "a host that is deleted comes back"
  }
  assert {
    condition     = google_compute_instance_template.host.scheduling[0].provisioning_model == "RESERVATION_BOUND" && google_compute_instance_template.host.reservation_affinity[0].specific_reservation[0].values == tolist(["mine"])
    error_message = "the reservation is not used"
  }
}

run "its_hosts_are_deleted_after_a_day" {
  command = apply
  assert {
    condition     = google_compute_instance_template.host.scheduling[0].max_run_duration[0].seconds == 86400 && google_compute_instance_template.host.scheduling[0].instance_termination_action == "DELETE" && !google_compute_instance_template.host.scheduling[0].automatic_restart
    error_message = "there is no limit"
  }
  assert {
    condition     = length(google_compute_instance_template.host.network_interface[0].access_config) == 0
    error_message = "it has a public IP"
  }
  assert {
    condition     = google_compute_instance_template.host.labels == tomap({ owner = "ada", tool = "dtrain" })
    error_message = "its cost has no owner"
  }
}

run "flex_start_is_another_kind" {
  command = plan
  variables {
    reservation = null
    flex_start  = true
  }
  assert {
    condition     = google_compute_instance_template.host.scheduling[0].provisioning_model == "FLEX_START" && google_compute_instance_template.host.reservation_affinity[0].type == "NO_RESERVATION"
    error_message = "flex-start does not use reservations"
  }
}

run "flex_start_has_a_limit" {
  command = plan
  variables {
    reservation = null
    flex_start  = true
    hours       = 200
  }
  expect_failures = [var.flex_start]
}

run "one_host_needs_no_topology" {
  command = plan
  variables {
    machine     = "ct6e-standard-8t"
    hosts       = 1
    topology    = null
    reservation = null
    spot        = true
  }
  assert {
    condition     = length(google_compute_resource_policy.slice) == 0 && length(google_compute_instance_group_manager.slice.target_size_policy) == 0 && google_compute_instance_template.host.scheduling[0].provisioning_model == "SPOT"
    error_message = "one host is no slice"
  }
}

run "several_hosts_need_a_topology" {
  command = plan
  variables {
    topology = null
  }
  expect_failures = [var.topology]
}

run "several_on_demand_are_refused" {
  command = plan
  variables {
    reservation = null
  }
  expect_failures = [var.reservation]
}

run "tpu7x_needs_an_image" {
  command = plan
  variables {
    machine = "tpu7x-standard-4t"
  }
  expect_failures = [var.image]
}

run "a_limit_has_a_limit" {
  command = plan
  variables {
    hours = 3000
  }
  expect_failures = [var.hours]
}
