"""Benchmarks of tf_gpipe: `python -m tools.benchmark COMMAND`."""

import argparse

from tools import quiet

# Comes before other modules import TensorFlow with all its messages.
quiet.import_tensorflow()

from tf_gpipe import progress  # noqa: E402
from tools import command_line  # noqa: E402
from tools.benchmark import auto_remat  # noqa: E402
from tools.benchmark import baselines  # noqa: E402
from tools.benchmark import breakdown  # noqa: E402
from tools.benchmark import checkpoint  # noqa: E402
from tools.benchmark import generate  # noqa: E402
from tools.benchmark import memory  # noqa: E402
from tools.benchmark import one_device  # noqa: E402
from tools.benchmark import peers  # noqa: E402
from tools.benchmark import pipeline  # noqa: E402
from tools.benchmark import plan  # noqa: E402
from tools.benchmark import step  # noqa: E402
from tools.benchmark import table2  # noqa: E402
from tools.benchmark import table3  # noqa: E402
from tools.benchmark import trace  # noqa: E402
from tools.benchmark import tune  # noqa: E402


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark", description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (
        step,
        trace,
        pipeline,
        peers,
        baselines,
        breakdown,
        checkpoint,
        generate,
        memory,
        table2,
        table3,
        tune,
        plan,
        one_device,
        auto_remat,
    ):
        name = module.__name__.rpartition(".")[-1]
        command = commands.add_parser(
            name,
            # argparse would take a single per cent sign for a placeholder.
            help=module.main.__doc__.splitlines()[0].replace("%", "%%"),
            description=module.main.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object on the last line",
        )
        command.add_argument(
            "--plot",
            metavar="PATH",
            help="save a picture of the table here (.png, .svg)",
        )
        command.set_defaults(main=module.main)
    args = parser.parse_args()
    try:
        if args.plot and getattr(args, "only", None):
            raise argparse.ArgumentError(None, "--plot is not for --only")
        with progress.shown(not args.json), progress.doing(args.command):
            report = args.main(args)
        if report:
            report.print(args.json)
            if args.plot:
                with command_line.checking():
                    report.plot(args.plot)
    except argparse.ArgumentError as e:
        commands.choices[args.command].error(str(e))


if __name__ == "__main__":
    main()
