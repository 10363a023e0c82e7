# A cluster for `launch: {kind: gke}`: a small pool for the system, and one pool of accelerators for each slice, which the
# autoscaler grows from no host to all of them when a JobSet needs it. Output `setup`: the commands that install JobSet
# and the Kubernetes service account.

locals {
  labels = merge({ tool = "dtrain" }, var.labels)
  pools = merge([
    for name, pool in var.pools : {
      for slice in range(pool.slices) : (pool.slices > 1 ? "${name}-${slice}" : name) => pool
    }
  ]...)
}

resource "google_project_service" "this" {
  for_each = toset(["container.googleapis.com", "cloudresourcemanager.googleapis.com"])

  project            = var.project
  service            = each.value
  disable_on_destroy = false # another stack may need it
}

data "google_project" "this" {
  project_id = var.project
  depends_on = [google_project_service.this]
}

resource "google_container_cluster" "this" {
  #checkov:skip=CKV_GCP_21:it has local.labels, which checkov does not resolve
  #checkov:skip=CKV_GCP_12:Dataplane V2 (datapath_provider) enforces network policies by itself
  #checkov:skip=CKV_GCP_66:which images may run is a policy of the organisation
  #checkov:skip=CKV_GCP_65:the groups that operate the cluster are a policy of the organisation, too
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
  resource_labels             = local.labels
  enable_legacy_abac          = false

  release_channel {
    channel = "REGULAR"
  }

  # upgrades and repairs that can wait happen here; a JobSet resumes from its last checkpoint after them
  maintenance_policy {
    recurring_window {
      start_time = var.maintenance.start
      end_time   = var.maintenance.end
      recurrence = var.maintenance.recurrence
    }
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

  depends_on = [google_project_service.this, google_project_iam_member.nodes]
}

resource "google_container_node_pool" "system" {
  project        = var.project
  name           = "system"
  cluster        = google_container_cluster.this.id
  node_locations = distinct([for pool in values(var.pools) : pool.zone])
  node_count     = 1

  node_config {
    machine_type    = "e2-standard-4"
    resource_labels = local.labels
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
    resource_labels = local.labels
    # limits each node, not the run: for a JobSet that still exists, the autoscaler creates a new node
    max_run_duration = var.hours == null ? null : "${ceil(var.hours * 3600)}s"
    service_account  = var.service_account
    oauth_scopes     = ["https://www.googleapis.com/auth/cloud-platform"]
    metadata         = { disable-legacy-endpoints = "true" }

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

# permissions that a node needs to be healthy
resource "google_project_iam_member" "nodes" {
  project = var.project
  role    = "roles/container.defaultNodeServiceAccount"
  member  = "serviceAccount:${var.service_account}"
}

# pods of one Kubernetes service account use the service account of the nodes
resource "google_service_account_iam_member" "pods" {
  service_account_id = "projects/${var.project}/serviceAccounts/${var.service_account}"
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${google_container_cluster.this.workload_identity_config[0].workload_pool}[${var.pods.namespace}/${var.pods.account}]"
}
