# What every launch on Google Cloud stands on: a private network, a bucket for run folders, and who the machines are.

module "network" {
  source  = "../network"
  project = var.project
  region  = var.region
}

module "service_account" {
  source  = "../service_account"
  project = var.project
  secrets = var.secrets
  keeper  = var.keeper
}

module "bucket" {
  source   = "../bucket"
  project  = var.project
  name     = var.bucket
  location = var.region
  writers  = { training = module.service_account.member }
}
