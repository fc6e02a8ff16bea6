"""Test suites of other packages on hessiankit's matrices; pytest plugins that run only with the source of the package."""
