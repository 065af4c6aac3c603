"""Candidate trees and their acceptance."""
