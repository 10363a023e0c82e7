output "network" {
  description = "The network's id."
  value       = google_compute_network.this.id
}

output "subnetwork" {
  description = "The subnetwork's id."
  value       = google_compute_subnetwork.this.id
}
