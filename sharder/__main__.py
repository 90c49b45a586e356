from sharder.cli import main

main()
