output "hosts" {
  description = "Their addresses in the network, by rank: `launch.hosts` of kind ssh."
  value       = google_compute_instance.host[*].network_interface[0].network_ip
}
