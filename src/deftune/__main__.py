from deftune.cli import main

raise SystemExit(main())
