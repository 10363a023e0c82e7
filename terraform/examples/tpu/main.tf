# Everything around `launch: {kind: queued}`, or group for TPU7x: a private network, a bucket, who the machines are. The chips
# themselves are asked for by dtrain, again after each preemption.
#
#   dtrain launch up recipe.yaml --terraform terraform/examples/tpu --var project=my-project --var bucket=my-runs
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

module "network" {
  source  = "../../network"
  project = var.project
  region  = var.region
}

module "service_account" {
  source  = "../../service_account"
  project = var.project
  keeper  = true
}

module "bucket" {
  source   = "../../bucket"
  project  = var.project
  name     = var.bucket
  location = var.region
  writers  = { training = module.service_account.member }
}
