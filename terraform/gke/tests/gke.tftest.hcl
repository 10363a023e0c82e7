mock_provider "google" {
  mock_data "google_project" {
    defaults = {
      number = "123456789"
    }
  }
}

variables {
  project         = "my-project"
  region          = "us-east5"
  name            = "dtrain-a"
  labels          = { owner = "ada" }
  network         = "projects/my-project/global/networks/dtrain"
  subnetwork      = "projects/my-project/regions/us-east5/subnetworks/dtrain"
  service_account = "dtrain@my-project.iam.gserviceaccount.com"
  operators       = { office = "203.0.113.0/24" }
  pools = {
    v6e  = { zone = "us-east5-b", machine = "ct6e-standard-4t", hosts = 4, topology = "4x4", slices = 2, spot = true }
    one  = { zone = "us-east5-b", machine = "ct5lp-hightpu-4t", hosts = 1, topology = "2x2" }
    h100 = { zone = "us-east5-a", machine = "a3-highgpu-8g", hosts = 2, gpu = { type = "nvidia-h100-80gb", count = 8 } }
  }
}

run "a_pool_for_each_slice" {
  command = plan

  assert {
    condition     = toset(keys(google_container_node_pool.accelerators)) == toset(["v6e-0", "v6e-1", "one", "h100"])
    error_message = "two slices, a host, and GPUs"
  }
  assert {
    condition     = google_container_node_pool.accelerators["v6e-0"].placement_policy[0].tpu_topology == "4x4"
    error_message = "the hosts of a slice are not connected"
  }
  assert {
    condition     = length(google_container_node_pool.accelerators["one"].placement_policy) == 0
    error_message = "a pool of one host has no topology"
  }
  assert {
    condition     = google_container_node_pool.accelerators["h100"].node_config[0].guest_accelerator[0].count == 8
    error_message = "eight GPUs a host"
  }
  assert {
    condition     = alltrue([for pool in google_container_node_pool.accelerators : pool.autoscaling[0].min_node_count == 0])
    error_message = "nodes are billed while nothing runs"
  }
  assert {
    condition     = google_container_node_pool.accelerators["v6e-1"].node_config[0].spot && !google_container_node_pool.accelerators["one"].node_config[0].spot
    error_message = "spot although it is not requested"
  }
}

run "nodes_have_a_limit_and_an_owner" {
  command = plan

  assert {
    condition     = alltrue([for pool in google_container_node_pool.accelerators : pool.node_config[0].max_run_duration == "86400s"])
    error_message = "a node lives forever"
  }
  assert {
    condition     = google_container_cluster.this.resource_labels == tomap({ owner = "ada", tool = "dtrain" }) && google_container_node_pool.accelerators["one"].node_config[0].resource_labels == tomap({ owner = "ada", tool = "dtrain" })
    error_message = "its cost has no owner"
  }
  assert {
    condition     = google_container_cluster.this.release_channel[0].channel == "REGULAR" && google_container_cluster.this.maintenance_policy[0].recurring_window[0].recurrence == "FREQ=WEEKLY;BYDAY=SA,SU"
    error_message = "upgrades come at any time"
  }
  assert {
    condition     = google_container_node_pool.system.node_locations == toset(["us-east5-a", "us-east5-b"])
    error_message = "system nodes in zones without a pool"
  }
}

run "nodes_are_private" {
  command = plan

  assert {
    condition     = google_container_cluster.this.private_cluster_config[0].enable_private_nodes
    error_message = "a node has a public IP"
  }
  assert {
    condition     = [for block in google_container_cluster.this.master_authorized_networks_config[0].cidr_blocks : block.cidr_block] == ["203.0.113.0/24"]
    error_message = "kubectl from the office only"
  }
  assert {
    condition     = google_service_account_iam_member.pods.member == "serviceAccount:my-project.svc.id.goog[default/dtrain]"
    error_message = "one account of one namespace"
  }
}

run "the_internet_is_no_operator" {
  command = plan
  variables {
    operators = { all = "0.0.0.0/0" }
  }
  expect_failures = [var.operators]
}

run "tpus_or_gpus" {
  command = plan
  variables {
    pools = { both = { zone = "a", machine = "b", hosts = 1, topology = "2x2", gpu = { type = "c", count = 1 } } }
  }
  expect_failures = [var.pools]
}

run "a_reservation_is_not_spot" {
  command = plan
  variables {
    pools = { both = { zone = "a", machine = "b", hosts = 1, topology = "2x2", spot = true, reservation = "r" } }
  }
  expect_failures = [var.pools]
}
