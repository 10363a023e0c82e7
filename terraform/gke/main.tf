# A cluster for `launch: {kind: gke}`: a small pool for the system, and a pool of accelerators for each slice, from none to
# all of its hosts. JobSet and Kueue are put on it with kubectl.

locals {
  pools = merge([
    for name, pool in var.pools : {
      for slice in range(pool.slices) : (pool.slices > 1 ? "${name}-${slice}" : name) => pool
    }
  ]...)
}

resource "google_container_cluster" "this" {
  #checkov:skip=CKV_GCP_12:Dataplane V2 (datapath_provider) enforces network policies by itself
  #checkov:skip=CKV_GCP_66:which images may run is for the organisation to say
  #checkov:skip=CKV_GCP_65:so are the groups that may operate it
  #checkov:skip=CKV_GCP_69:the default pool is removed; every other has workload_metadata_config
  project             = var.project
  name                = var.name
  location            = var.region
  network             = var.network
  subnetwork          = var.subnetwork
  deletion_protection = var.protected

  remove_default_node_pool    = true
  initial_node_count          = 1
  datapath_provider           = "ADVANCED_DATAPATH"
  enable_shielded_nodes       = true
  enable_intranode_visibility = true
  resource_labels             = { tool = "dtrain" }
  enable_legacy_abac          = false

  release_channel {
    channel = "RAPID"
  }

  workload_identity_config {
    workload_pool = "${var.project}.svc.id.goog"
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = false
    master_ipv4_cidr_block  = var.control_plane
  }

  master_authorized_networks_config {
    dynamic "cidr_blocks" {
      for_each = var.operators
      content {
        cidr_block   = cidr_blocks.value
        display_name = cidr_blocks.key
      }
    }
  }

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = true
    }
  }

  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

resource "google_container_node_pool" "system" {
  project    = var.project
  name       = "system"
  cluster    = google_container_cluster.this.id
  node_count = 1

  node_config {
    machine_type    = "e2-standard-4"
    image_type      = "COS_CONTAINERD"
    service_account = var.service_account
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    metadata        = { disable-legacy-endpoints = "true" }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }
}

resource "google_container_node_pool" "accelerators" {
  for_each = local.pools

  project        = var.project
  name           = each.key
  cluster        = google_container_cluster.this.id
  node_locations = [each.value.zone]

  initial_node_count = 0

  autoscaling {
    min_node_count  = 0
    max_node_count  = each.value.hosts
    location_policy = "ANY"
  }

  dynamic "placement_policy" {
    for_each = each.value.topology != null && each.value.hosts > 1 ? [each.value.topology] : []
    content {
      type         = "COMPACT"
      tpu_topology = placement_policy.value
    }
  }

  node_config {
    machine_type    = each.value.machine
    image_type      = "COS_CONTAINERD"
    spot            = each.value.spot
    service_account = var.service_account
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    metadata        = { disable-legacy-endpoints = "true" }

    dynamic "guest_accelerator" {
      for_each = each.value.gpu == null ? [] : [each.value.gpu]
      content {
        type  = guest_accelerator.value.type
        count = guest_accelerator.value.count
        gpu_driver_installation_config {
          gpu_driver_version = "LATEST"
        }
      }
    }

    dynamic "reservation_affinity" {
      for_each = each.value.reservation == null ? [] : [each.value.reservation]
      content {
        consume_reservation_type = "SPECIFIC_RESERVATION"
        key                      = "compute.googleapis.com/reservation-name"
        values                   = [reservation_affinity.value]
      }
    }

    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    gvnic {
      enabled = true
    }
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  lifecycle {
    ignore_changes = [initial_node_count]
  }
}

# pods of one Kubernetes service account act as the nodes' account: that is how they reach the bucket
resource "google_service_account_iam_member" "pods" {
  service_account_id = "projects/${var.project}/serviceAccounts/${var.service_account}"
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${google_container_cluster.this.workload_identity_config[0].workload_pool}[${var.pods.namespace}/${var.pods.account}]"
}
