# Hosts with GPUs, placed near each other, for `launch: {kind: ssh}`. Each has one network interface; the GPU network
# interfaces of a3-ultragpu and a4 need their own networks, which this module does not create. Hosts are created one by one:
# without capacity for all of them, `apply` fails and the created ones are billed until `terraform destroy` or `hours`.

module "host" {
  source = "../host"
  bucket = var.bucket
  wheel  = var.wheel
  lock   = var.lock
  hours  = var.hours
}

resource "google_compute_resource_policy" "near" {
  count = var.hosts > 1 && var.reservation == null ? 1 : 0 # a reservation has its own placement

  project = var.project
  region  = join("-", slice(split("-", var.zone), 0, 2))
  name    = var.name

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_compute_instance" "host" {
  #checkov:skip=CKV_GCP_38:the keys of Google are enough for a disk that holds the system only
  count = var.hosts

  project                 = var.project
  zone                    = var.zone
  name                    = "${var.name}-${count.index}"
  machine_type            = var.machine
  labels                  = merge({ tool = "dtrain" }, var.labels)
  metadata_startup_script = module.host.script
  metadata                = { "block-project-ssh-keys" = "true", "enable-oslogin" = "TRUE" }
  resource_policies       = google_compute_resource_policy.near[*].id

  boot_disk {
    initialize_params {
      image  = var.image
      size   = 200
      labels = merge({ tool = "dtrain" }, var.labels)
    }
  }

  network_interface {
    network    = var.network
    subnetwork = var.subnetwork
    nic_type   = "GVNIC"
  }

  scheduling {
    provisioning_model          = var.spot ? "SPOT" : "STANDARD"
    preemptible                 = var.spot
    automatic_restart           = false # a restart would reset max_run_duration
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = var.hours == null && !var.spot ? null : "DELETE"

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
    enable_secure_boot          = false # the modules of the NVIDIA driver are not signed
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
}
