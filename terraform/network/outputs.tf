output "network" {
  description = "The network's id."
  value       = google_compute_network.this.id
}

output "subnetwork" {
  description = "The subnetwork's id."
  value       = google_compute_subnetwork.this.id
}

output "name" {
  description = "The network's name, as `launch.network` takes it."
  value       = google_compute_network.this.name
}

output "subnetwork_name" {
  description = "The subnetwork's name, as `launch.subnetwork` takes it."
  value       = google_compute_subnetwork.this.name
}
