mock_provider "google" {}

variables {
  project = "my-project"
  region  = "us-east5"
  name    = "dtrain-a"
}

run "nothing_is_open_to_the_internet" {
  command = plan
  assert {
    condition     = google_compute_firewall.iap_ssh.source_ranges == toset(["35.235.240.0/20"])
    error_message = "ssh must come from IAP only"
  }
  assert {
    condition     = !contains(google_compute_firewall.inside.source_ranges, "0.0.0.0/0")
    error_message = "the firewall is open"
  }
  assert {
    condition     = google_compute_subnetwork.this.private_ip_google_access && !google_compute_network.this.auto_create_subnetworks
    error_message = "Google APIs are reached without a public IP"
  }
  assert {
    condition     = keys(google_project_service.this) == ["compute.googleapis.com", "iap.googleapis.com"]
    error_message = "a new project has no API enabled"
  }
}

run "a_zone_is_no_region" {
  command = plan
  variables {
    region = "us-east5-a"
  }
  expect_failures = [var.region]
}

run "an_address_is_no_range" {
  command = plan
  variables {
    range = "10.0.0.0"
  }
  expect_failures = [var.range]
}
