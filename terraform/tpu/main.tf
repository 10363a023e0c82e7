# One slice of TPU VMs, all of its hosts or none, by the TPU API: v4, v5e, v5p and v6e. For `launch: {kind: ssh}`. The TPU
# API has no limit on the run time: a timer on each host deletes the node after `hours`.

locals {
  runtimes = {
    v4        = "tpu-ubuntu2204-base"
    v5litepod = "v2-alpha-tpuv5-lite"
    v5p       = "v2-alpha-tpuv5"
    v6e       = "v2-alpha-tpuv6e"
  }
  family = split("-", var.accelerator_type)[0]
}

module "host" {
  source = "../host"
  bucket = var.bucket
  wheel  = var.wheel
  lock   = var.lock
  tpu    = "projects/${var.project}/locations/${var.zone}/nodes/${var.name}"
  hours  = var.hours
}

resource "google_project_service" "this" {
  project            = var.project
  service            = "tpu.googleapis.com"
  disable_on_destroy = false # another stack may need it
}

# The id of a deleted role cannot be reused for weeks: each stack has its own id.
resource "terraform_data" "role" {
  count = var.hours == null ? 0 : 1
}

# The minimal permissions that a node needs to delete itself. The TPU API cannot restrict them to one node: the hosts may
# delete every TPU node of the project, and nothing else.
resource "google_project_iam_custom_role" "delete_node" {
  count = var.hours == null ? 0 : 1

  project     = var.project
  role_id     = "${replace(var.name, "-", "_")}_${substr(terraform_data.role[0].id, 0, 8)}"
  title       = "Delete TPU nodes (${var.name})"
  permissions = ["tpu.nodes.delete"]
}

resource "google_project_iam_member" "delete_node" {
  count = var.hours == null ? 0 : 1

  project = var.project
  role    = google_project_iam_custom_role.delete_node[0].id
  member  = "serviceAccount:${var.service_account}"
}

resource "google_tpu_v2_vm" "this" {
  provider = google-beta

  project          = var.project
  zone             = var.zone
  name             = var.name
  accelerator_type = var.accelerator_type
  runtime_version  = coalesce(var.runtime_version, local.runtimes[local.family])
  labels           = merge({ tool = "dtrain" }, var.labels)
  metadata         = { "startup-script" = module.host.script }

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

  depends_on = [google_project_service.this, google_project_iam_member.delete_node]

  lifecycle {
    replace_triggered_by = [terraform_data.script]
  }
}

resource "terraform_data" "script" {
  input = sha256(module.host.script)
}
