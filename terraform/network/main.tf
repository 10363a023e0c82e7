# A private network: no machine has a public IP, ssh is possible only through Identity-Aware Proxy (IAP), and machines reach
# the internet, for packages and images, through Cloud NAT.

resource "google_project_service" "this" {
  for_each = toset(["compute.googleapis.com", "iap.googleapis.com"])

  project            = var.project
  service            = each.value
  disable_on_destroy = false # another stack may need it
}

resource "google_compute_network" "this" {
  project                 = var.project
  name                    = var.name
  auto_create_subnetworks = false
  mtu                     = 8896

  depends_on = [google_project_service.this]
}

resource "google_compute_subnetwork" "this" {
  project                  = var.project
  name                     = var.name
  region                   = var.region
  network                  = google_compute_network.this.id
  ip_cidr_range            = var.range
  private_ip_google_access = true

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = var.pods
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = var.services
  }

  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.1
  }
}

resource "google_compute_router" "this" {
  project = var.project
  name    = var.name
  region  = var.region
  network = google_compute_network.this.id
}

resource "google_compute_router_nat" "this" {
  project                            = var.project
  name                               = var.name
  region                             = var.region
  router                             = google_compute_router.this.name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

resource "google_compute_firewall" "iap_ssh" {
  project       = var.project
  name          = "${var.name}-iap-ssh"
  network       = google_compute_network.this.id
  description   = "ssh, from Identity-Aware Proxy only"
  source_ranges = ["35.235.240.0/20"]

  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_compute_firewall" "inside" {
  project       = var.project
  name          = "${var.name}-inside"
  network       = google_compute_network.this.id
  description   = "between machines and pods of this network: collectives and the JAX coordinator"
  source_ranges = [var.range, var.pods]

  allow {
    protocol = "tcp"
  }
  allow {
    protocol = "udp"
  }
  allow {
    protocol = "icmp"
  }
}
