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

module "ground" {
  source  = "../../ground"
  project = var.project
  bucket  = var.bucket
  region  = var.region
  keeper  = true
  secrets = var.secrets
}
