# One slice of TPUs as a managed instance group of Compute Engine: the way for v5p, v6e and TPU7x. A group is one slice.

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
  #checkov:skip=CKV_GCP_37:Google's own keys are enough for a disk that holds nothing but the system
  project                 = var.project
  name_prefix             = "${var.name}-"
  machine_type            = var.machine
  labels                  = { tool = "dtrain" }
  metadata_startup_script = var.startup_script
  metadata                = { "block-project-ssh-keys" = "true", "enable-oslogin" = "true" }

  disk {
    source_image = var.image
    boot         = true
    auto_delete  = true
    disk_size_gb = 200
  }

  network_interface {
    network    = var.network
    subnetwork = var.subnetwork
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

  version {
    instance_template = google_compute_instance_template.host.id
  }

  instance_lifecycle_policy {
    default_action_on_failure = "REPAIR"
  }

  dynamic "resource_policies" {
    for_each = google_compute_resource_policy.slice
    content {
      workload_policy = resource_policies.value.id
    }
  }
}
