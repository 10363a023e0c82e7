mock_provider "google" {}

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
}

run "one_host_needs_no_placement" {
  command = plan
  assert {
    condition     = length(google_compute_resource_policy.near) == 0 && length(google_compute_instance.host) == 1
    error_message = "a policy without use"
  }
}

run "several_are_near_each_other_and_ordered" {
  command = apply
  variables {
    hosts = 2
  }
  assert {
    condition     = google_compute_resource_policy.near[0].group_placement_policy[0].collocation == "COLLOCATED"
    error_message = "they may be anywhere"
  }
  assert {
    condition     = google_compute_instance.host[1].name == "dtrain-a-1" && length(google_compute_instance.host[0].network_interface[0].access_config) == 0
    error_message = "a name, and no public IP"
  }
  assert {
    condition     = google_compute_instance.host[0].labels == tomap({ owner = "ada", tool = "dtrain" })
    error_message = "its cost has no owner"
  }
}

run "they_are_deleted_after_a_day" {
  command = plan
  assert {
    condition     = google_compute_instance.host[0].scheduling[0].max_run_duration[0].seconds == 86400 && google_compute_instance.host[0].scheduling[0].instance_termination_action == "DELETE" && !google_compute_instance.host[0].scheduling[0].automatic_restart
    error_message = "there is no limit"
  }
}

run "a_limit_can_be_left_out" {
  command = plan
  variables {
    hours = null
  }
  assert {
    condition     = length(google_compute_instance.host[0].scheduling[0].max_run_duration) == 0
    error_message = "there is one"
  }
}

run "a_reservation_is_used" {
  command = plan
  variables {
    hosts       = 2
    reservation = "mine"
  }
  assert {
    condition     = google_compute_instance.host[0].reservation_affinity[0].type == "SPECIFIC_RESERVATION" && length(google_compute_resource_policy.near) == 0
    error_message = "it is not"
  }
}

run "a_machine_without_gpus_is_refused" {
  command = plan
  variables {
    machine = "n2-standard-8"
  }
  expect_failures = [var.machine]
}

run "a_machine_that_does_not_exist_is_refused" {
  command = plan
  variables {
    machine = "a3-ultragpu-4g"
  }
  expect_failures = [var.machine]
}
