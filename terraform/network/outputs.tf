output "network" {
  description = "The id of the network."
  value       = google_compute_network.this.id
}

output "subnetwork" {
  description = "The id of the subnetwork; known only after its machines can reach the internet and be reached through IAP."
  value       = google_compute_subnetwork.this.id
  depends_on  = [google_compute_router_nat.this, google_compute_firewall.iap_ssh, google_compute_firewall.inside]
}
