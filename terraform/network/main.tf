# A network of its own for training: no address of a machine is public, ssh comes in by IAP alone, and machines
# reach the outside, for packages and images, through NAT.

resource "google_compute_network" "this" {
  project                 = var.project
  name                    = var.name
  auto_create_subnetworks = false
  mtu                     = 8896
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
  description   = "ssh, from Google's identity-aware proxy alone"
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
  description   = "machines and pods of this network among themselves: collectives and JAX's coordinator"
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
