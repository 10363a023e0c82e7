terraform {
  required_version = ">= 1.7"
  required_providers {
    google-beta = {
      source  = "hashicorp/google-beta"
      version = ">= 6.25, < 9"
    }
  }
}
