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

module "ground" {
  source  = "../../ground"
  project = var.project
  bucket  = var.bucket
  region  = var.region
}

module "gke" {
  source          = "../../gke"
  project         = var.project
  region          = var.region
  network         = module.ground.network.id
  subnetwork      = module.ground.subnetwork.id
  service_account = module.ground.account
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
