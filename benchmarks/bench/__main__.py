from .command import make_parser, run


if __name__ == "__main__":
    run(make_parser("python -m benchmarks.bench").parse_args())
