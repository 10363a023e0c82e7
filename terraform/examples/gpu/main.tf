# Hosts of H100s that stay, for `launch: {kind: ssh}`.
# They have no address of the world: ssh goes through IAP or from inside.
#
#   dtrain launch up recipe.yaml --terraform terraform/examples/gpu --var project=my-project --var bucket=my-runs
#
# or by hand: terraform init, terraform apply, and the output `launch` as the recipe's section.

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

module "gpu" {
  source          = "../../gpu"
  project         = var.project
  zone            = var.zone
  hosts           = var.hosts
  network         = module.ground.network.id
  subnetwork      = module.ground.subnetwork.id
  service_account = module.ground.account
}
