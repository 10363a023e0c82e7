# Hosts of eight GPUs that stay until they are destroyed, near each other, reached over ssh: `launch: {kind: ssh}`. They have
# one network card each; the cards beside the GPUs need networks of their own, which are not made here.

resource "google_compute_resource_policy" "near" {
  count = var.hosts > 1 ? 1 : 0

  project = var.project
  region  = join("-", slice(split("-", var.zone), 0, 2))
  name    = var.name

  group_placement_policy {
    collocation = "COLLOCATED"
  }
}

resource "google_compute_instance" "host" {
  #checkov:skip=CKV_GCP_38:Google's own keys are enough for a disk that holds nothing but the system
  count = var.hosts

  project                 = var.project
  zone                    = var.zone
  name                    = "${var.name}-${count.index}"
  machine_type            = var.machine
  labels                  = { tool = "dtrain" }
  metadata_startup_script = var.startup_script
  metadata                = { "block-project-ssh-keys" = "true", "enable-oslogin" = "true" }
  resource_policies       = google_compute_resource_policy.near[*].id

  boot_disk {
    initialize_params {
      image = var.image
      size  = 200
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
    automatic_restart           = !var.spot
    on_host_maintenance         = "TERMINATE"
    instance_termination_action = var.spot ? "STOP" : null
  }

  service_account {
    email  = var.service_account
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  }

  shielded_instance_config {
    enable_secure_boot          = false # the drivers are not signed
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
}
