"""python -m trustregion.doctor: what is installed, whether verl loaded the plugin, what this machine can run."""

from trustregion.verl_plugin.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
