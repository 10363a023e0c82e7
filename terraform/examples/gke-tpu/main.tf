# Everything that `launch: {kind: gke, bucket: ...}` needs for v6e slices of 16 chips:
#
#   terraform init
#   terraform apply -var project=my-project -var bucket=my-runs -var 'operators={office="203.0.113.0/24"}'
#   $(terraform output -raw credentials)

terraform {
  required_version = ">= 1.7"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.25, < 9"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

module "network" {
  source  = "../../network"
  project = var.project
  region  = var.region
}

module "service_account" {
  source  = "../../service_account"
  project = var.project
}

module "bucket" {
  source   = "../../bucket"
  project  = var.project
  name     = var.bucket
  location = var.region
  writers  = { training = module.service_account.member }
}

module "gke" {
  source          = "../../gke"
  project         = var.project
  region          = var.region
  network         = module.network.network
  subnetwork      = module.network.subnetwork
  service_account = module.service_account.email
  operators       = var.operators
  pools = {
    v6e = {
      zone     = var.zone
      machine  = "ct6e-standard-4t"
      hosts    = 4
      topology = "4x4"
      slices   = var.slices
      spot     = var.spot
    }
  }
}
