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

module "ground" {
  source  = "../../ground"
  project = var.project
  bucket  = var.bucket
  region  = var.region
}

module "tpu_vm" {
  source           = "../../tpu_vm"
  project          = var.project
  zone             = var.zone
  accelerator_type = var.accelerator_type
  network          = module.ground.network.id
  subnetwork       = module.ground.subnetwork.id
  service_account  = module.ground.account
}
