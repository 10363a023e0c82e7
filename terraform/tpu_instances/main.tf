# One slice of TPU instances on Compute Engine, for v5p, v6e and TPU7x: `launch: {kind: ssh}`. A slice of several hosts
# is created completely or not at all (bulk mode), which Compute Engine supports for reservations and flex-start. Nothing
# repairs it: a lost host is not replaced, and so no host is created again after `hours`.

module "host" {
  source = "../host"
  bucket = var.bucket
  wheel  = var.wheel
  lock   = var.lock
  hours  = var.hours
}

resource "google_compute_resource_policy" "slice" {
  count = var.topology == null ? 0 : 1

  project = var.project
  region  = join("-", slice(split("-", var.zone), 0, 2))
  name    = var.name

  workload_policy {
    type                 = "HIGH_THROUGHPUT"
    accelerator_topology = var.topology
  }
}

resource "google_compute_instance_template" "host" {
  #checkov:skip=CKV_GCP_37:Google-managed keys are enough for a disk that holds only the system
  project                 = var.project
  name_prefix             = "${substr(var.name, 0, 36)}-"
  machine_type            = var.machine
  labels                  = merge({ tool = "dtrain" }, var.labels)
  metadata_startup_script = module.host.script
  metadata                = { "block-project-ssh-keys" = "true", "enable-oslogin" = "TRUE" }

  disk {
    source_image = coalesce(var.image, "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e")
    boot         = true
    auto_delete  = true
    disk_size_gb = 200
    labels       = merge({ tool = "dtrain" }, var.labels)
  }

  network_interface {
    network    = var.network
    subnetwork = var.subnetwork
  }

  scheduling {
    provisioning_model          = var.reservation != null ? "RESERVATION_BOUND" : var.flex_start ? "FLEX_START" : var.spot ? "SPOT" : "STANDARD"
    preemptible                 = var.spot
    automatic_restart           = false # a restart would reset max_run_duration
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = var.hours == null && !var.spot && var.reservation == null ? null : "DELETE"

    dynamic "max_run_duration" {
      for_each = var.hours == null ? [] : [var.hours]
      content {
        seconds = ceil(max_run_duration.value * 3600)
      }
    }
  }

  reservation_affinity {
    type = var.reservation == null ? "NO_RESERVATION" : "SPECIFIC_RESERVATION"

    dynamic "specific_reservation" {
      for_each = var.reservation == null ? [] : [var.reservation]
      content {
        key    = "compute.googleapis.com/reservation-name"
        values = [specific_reservation.value]
      }
    }
  }

  service_account {
    email  = var.service_account
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_compute_instance_group_manager" "slice" {
  project            = var.project
  zone               = var.zone
  name               = var.name
  base_instance_name = var.name
  target_size        = var.hosts
  wait_for_instances = true

  version {
    instance_template = google_compute_instance_template.host.id
  }

  instance_lifecycle_policy {
    default_action_on_failure = "DO_NOTHING"
  }

  dynamic "target_size_policy" {
    for_each = var.hosts > 1 ? ["BULK"] : []
    content {
      mode = target_size_policy.value
    }
  }

  dynamic "resource_policies" {
    for_each = google_compute_resource_policy.slice
    content {
      workload_policy = resource_policies.value.id
    }
  }

  timeouts {
    create = "${var.wait}m"
  }

  lifecycle {
    replace_triggered_by = [google_compute_instance_template.host.id]
  }
}

# the group chooses the names of its hosts
data "google_compute_instance_group" "slice" {
  self_link = google_compute_instance_group_manager.slice.instance_group
}
