mock_provider "google" {}

variables {
  project         = "my-project"
  zone            = "us-east5-a"
  network         = "projects/my-project/global/networks/dtrain"
  subnetwork      = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account = "dtrain@my-project.iam.gserviceaccount.com"
}

run "one_host_lies_anywhere" {
  command = apply
  assert {
    condition     = length(google_compute_resource_policy.near) == 0 && length(google_compute_instance.host) == 1
    error_message = "one host has neighbours"
  }
}

run "several_lie_near_each_other_and_are_told_by_rank" {
  command = apply
  variables {
    hosts = 2
  }
  assert {
    condition     = google_compute_resource_policy.near[0].group_placement_policy[0].collocation == "COLLOCATED"
    error_message = "they may lie anywhere"
  }
  assert {
    condition     = google_compute_instance.host[1].name == "dtrain-1" && length(output.hosts) == 2
    error_message = "they have no order"
  }
  assert {
    condition     = length(google_compute_instance.host[0].network_interface[0].access_config) == 0
    error_message = "they can be reached from the internet"
  }
}

run "what_is_no_machine_with_gpus_is_refused" {
  command = plan
  variables {
    machine = "n2-standard-8"
  }
  expect_failures = [var.machine]
}
