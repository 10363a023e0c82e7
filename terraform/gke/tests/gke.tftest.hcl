mock_provider "google" {}

variables {
  project         = "my-project"
  region          = "us-east5"
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
    error_message = "a slice of several hosts lies together"
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
    error_message = "nothing is paid for while nothing runs"
  }
  assert {
    condition     = google_container_node_pool.accelerators["v6e-1"].node_config[0].spot && !google_container_node_pool.accelerators["one"].node_config[0].spot
    error_message = "spot where it was asked for"
  }
}

run "nodes_are_private" {
  command = plan

  assert {
    condition     = google_container_cluster.this.private_cluster_config[0].enable_private_nodes
    error_message = "no node has a public address"
  }
  assert {
    condition     = [for block in google_container_cluster.this.master_authorized_networks_config[0].cidr_blocks : block.cidr_block] == ["203.0.113.0/24"]
    error_message = "kubectl from the office alone"
  }
  assert {
    condition     = google_service_account_iam_member.pods.member == "serviceAccount:my-project.svc.id.goog[default/default]"
    error_message = "one account of one namespace"
  }
}

run "the_world_operates_nothing" {
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
