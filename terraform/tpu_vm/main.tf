# One slice of TPU VMs that stays until it is destroyed, reached over ssh: `launch: {kind: ssh}`. It comes by the TPU API,
# which does not serve TPU7x; there, and for slices that should come back after a preemption, see `launch: {kind: group}`.

locals {
  runtimes = {
    v4        = "tpu-ubuntu2204-base"
    v5litepod = "v2-alpha-tpuv5-lite"
    v5p       = "v2-alpha-tpuv5"
    v6e       = "v2-alpha-tpuv6e"
  }
  family = split("-", var.accelerator_type)[0]
}

resource "google_tpu_v2_vm" "this" {
  provider = google-beta

  project          = var.project
  zone             = var.zone
  name             = var.name
  accelerator_type = var.accelerator_type
  runtime_version  = coalesce(var.runtime_version, local.runtimes[local.family])
  labels           = { tool = "dtrain" }
  metadata         = var.startup_script == "" ? {} : { "startup-script" = var.startup_script }

  network_config {
    network             = var.network
    subnetwork          = var.subnetwork
    enable_external_ips = false
  }

  scheduling_config {
    spot     = var.spot
    reserved = var.reserved
  }

  service_account {
    email = var.service_account
    scope = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot = true
  }
}
