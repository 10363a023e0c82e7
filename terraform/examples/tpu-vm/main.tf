# A slice of TPU VMs that stays, for `launch: {kind: ssh}`.
# It has no address of the world: ssh goes through IAP or from inside.
#
#   dtrain launch up recipe.yaml --terraform terraform/examples/tpu-vm --var project=my-project --var bucket=my-runs
#
# or by hand: terraform init, terraform apply, and the output `launch` as the recipe's section.

terraform {
  required_version = ">= 1.7"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.25, < 9"
    }
    google-beta = {
      source  = "hashicorp/google-beta"
      version = ">= 6.25, < 9"
    }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

provider "google-beta" {
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

module "tpu_vm" {
  source           = "../../tpu_vm"
  project          = var.project
  zone             = var.zone
  accelerator_type = var.accelerator_type
  network          = module.network.network
  subnetwork       = module.network.subnetwork
  service_account  = module.service_account.email
}
