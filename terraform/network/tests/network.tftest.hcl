mock_provider "google" {}

variables {
  project = "my-project"
  region  = "us-east5"
}

run "nothing_is_open_to_the_world" {
  command = plan

  assert {
    condition     = google_compute_firewall.iap_ssh.source_ranges == toset(["35.235.240.0/20"])
    error_message = "ssh must come from IAP alone"
  }
  assert {
    condition     = !contains(google_compute_firewall.inside.source_ranges, "0.0.0.0/0")
    error_message = "the inside is not the world"
  }
  assert {
    condition     = google_compute_subnetwork.this.private_ip_google_access
    error_message = "machines without an address must reach Google's services"
  }
  assert {
    condition     = google_compute_network.this.auto_create_subnetworks == false
    error_message = "no subnetwork of its own accord"
  }
}

run "a_zone_is_no_region" {
  command = plan
  variables {
    region = "us-east5-a"
  }
  expect_failures = [var.region]
}

run "a_range_is_one" {
  command = plan
  variables {
    range = "10.0.0.0"
  }
  expect_failures = [var.range]
}
