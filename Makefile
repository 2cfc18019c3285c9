# `make` alone lists what can be done. demo and test set everything up themselves, in .venv; a second call is quick.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_VERSIONS ?= 2.11 2.12 2.14 2.15
PROCESSES ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start hundreds of processes, and each would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
# Modules are compiled when they are first imported: pip would compile all that the packages have, on one core.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile
EDITABLE := build/editable
CXX_SOURCES := $(shell find csrc cmake CMakeLists.txt -type f 2>/dev/null)
CXX_TESTS := $(shell find tests/cpp -type f 2>/dev/null)
BUILD_INPUTS := pyproject.toml $(wildcard build_backend/*.py) $(CXX_SOURCES)
# An editable install is one CMake build in $(EDITABLE); configuring it with the GoogleTests keeps ctest in the same build.
INSTALL := $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
CTEST := $(BIN)/ctest --parallel 2 --output-on-failure --no-tests=error
SPHINX := $(BIN)/python -m sphinx -c docs -b html -d out/doctrees --fail-on-warning --keep-going --quiet
WITH_TESTS := --config-settings=cmake.define.ACCELERATE_BUILD_TESTS=ON

.DEFAULT_GOAL := help
XLA_VENV := .venv-xla
XLA_PIP := $(XLA_VENV)/bin/python -m pip install --quiet --no-compile

.PHONY: help env build demo test test-gpu test-full test-tensorflow ctest pytest tsan asan lint format docs notebooks site wheel compile-only bench clean test-xla fuzz endurance storm collectives

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(VENV)/.created:
	@.ci/system-packages $(PYTHON)
	@echo "==> creating .venv (some seconds)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes first and alone: it decides what the package is built against.
$(VENV)/.torch: $(VENV)/.created
	@echo "==> installing $(TORCH) (about 1 minute; a build with CUDA takes several, and 5 GB)"
	@$(PIP_INSTALL) '$(TORCH)'
	@touch $@

$(VENV)/.requirements: $(VENV)/.torch $(wildcard requirements/*.txt)
	@echo "==> installing the tools in requirements/dev.txt (about 1 minute)"
	@$(PIP_INSTALL) -r requirements/dev.txt
	@DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation -r requirements/deepspeed.txt
	@touch $@

env: $(VENV)/.requirements ## create .venv with torch and the tools

$(VENV)/.built: $(VENV)/.requirements $(BUILD_INPUTS)
	@.ci/system-packages $(PYTHON)
	@echo "==> compiling the C++ core and installing the package (about 2 minutes on 2 cores; less where ccache has seen it)"
	@$(INSTALL)
	@touch $@

$(VENV)/.built-with-tests: $(VENV)/.requirements $(BUILD_INPUTS) $(CXX_TESTS)
	@.ci/system-packages $(PYTHON) tests
	@echo "==> compiling the C++ core and its tests, and installing the package (about 4 minutes on 2 cores)"
	@$(INSTALL) $(WITH_TESTS)
	@touch $(VENV)/.built $@

build: $(VENV)/.built ## build the C++ core and install the package in editable mode

demo: build ## train the digits on one process, on two, and on two with the original, and show the times and losses
	@echo "==> training on 1 process, on $(PROCESSES), and on $(PROCESSES) with the original (about a minute)"
	@$(BIN)/python examples/show_digits.py --processes $(PROCESSES) --plot out/digits.png

ctest: $(VENV)/.built-with-tests
	$(CTEST) --test-dir $(EDITABLE)

# Most of the time goes into starting processes, which import torch, and into waiting for them: three at a time keep two
# cores busy. tests/conftest.py says which tests run beside which.
pytest: $(VENV)/.built-with-tests
	$(BIN)/python -m pytest -m "not long" --numprocesses 3 --durations=30 --durations-min=5 $(PYTEST_ARGS)

test: ctest pytest ## run the GoogleTests and the Python tests

# TensorFlow has an environment of its own, which sees the packages of the other one: requirements/tensorflow.txt says why.
$(VENV)-tensorflow/.created: $(VENV)/.requirements requirements/tensorflow.txt
	@echo "==> installing TensorFlow (about 1 minute, 1.5 GB)"
	@$(BIN)/python -m venv --without-pip $(VENV)-tensorflow
	@$(BIN)/python -c "$$SEE_PACKAGES"
	@$(BIN)/python -m pip --python $(VENV)-tensorflow/bin/python install --quiet --no-compile -r requirements/tensorflow.txt
	@touch $@

define SEE_PACKAGES
import pathlib, sysconfig
own = sysconfig.get_path("purelib")
other = pathlib.Path(own.replace("/$(VENV)/", "/$(VENV)-tensorflow/"))
(other / "packages.pth").write_text(f"import site; site.addsitedir({own!r})\n")
endef
export SEE_PACKAGES

test-tensorflow: build $(VENV)-tensorflow/.created ## run the tests of TensorFlow, and of Keras with all backends
	$(VENV)-tensorflow/bin/python -m pytest tests/distributed/test_tensorflow.py tests/distributed/test_keras.py $(PYTEST_ARGS)

SECONDS ?= 3600
endurance: build ## endless runs of SECONDS=3600: what processes hold may not grow; out/endurance.json and out/endurance.png
	PYTHONPATH=tests/distributed $(BIN)/python tests/endurance/run.py $(SECONDS)

# Two targets at a time; of each, inputs that it has found before, in out/fuzz, are tried first.
fuzz: build ## fuzz each parser of what comes from outside for SECONDS=3600, from the inputs in tests/fuzz/corpus
	@.ci/system-packages $(PYTHON) fuzz
	$(PIP_INSTALL) -r requirements/fuzz.txt
	$(BIN)/cmake --preset fuzz
	$(BIN)/cmake --build build/fuzz
	$(BIN)/python tests/fuzz/run_all.py $(SECONDS)

COLLECTIVES ?= 100000
collectives: $(VENV)/.built-with-tests ## COLLECTIVES=100000 random ones against a reference: in shared memory, staged, over hosts, over torch's backends
	ACCELERATE_CPP_TEST_COLLECTIVES=$(COLLECTIVES) $(EDITABLE)/tests/cpp/core_tests --gtest_filter='*Random*'
	ACCELERATE_CPP_TEST_COLLECTIVES=$(COLLECTIVES) $(EDITABLE)/tests/cpp/bridge_tests --gtest_filter='*Random*'

N ?= 1000
SEED ?= 1
JOBS ?= 2
storm: build ## hit N=1000 small runs with faults drawn from SEED=1, JOBS=2 at a time; out/storm-SEED.jsonl has the results
	@.ci/system-packages $(PYTHON) tests
	$(BIN)/python -m tests.storm --count $(N) --seed $(SEED) --jobs $(JOBS)

tsan asan: $(VENV)/.requirements
	@.ci/system-packages $(PYTHON) tests
	$(BIN)/cmake --preset $@
	$(BIN)/cmake --build build/$@
	$(CTEST) --test-dir build/$@

test-gpu: $(VENV)/.built-with-tests ## run the tests for GPUs; torch has to be a build for CUDA (docs/gpu.md)
	$(EDITABLE)/tests/cpp/nccl_device_tests
	ACCELERATE_CPP_TEST_FINALIZE=1 $(BIN)/python -m pytest -rs tests/gpu tests/distributed/test_cuda_gradients.py $(PYTEST_ARGS)

test-full: test ## make test, the long tests, and the core under the thread and address sanitizers
	@.ci/system-packages $(PYTHON) browser
	$(PIP_INSTALL) -r requirements/browser.txt -r requirements/docs.txt -r requirements/libraries.txt
	ACCELERATE_CPP_TEST_FINALIZE=1 $(BIN)/python -m pytest -m long --numprocesses 2 $(PYTEST_ARGS)
	ACCELERATE_CPP_TEST_COLLECTIVES=10000 $(EDITABLE)/tests/cpp/core_tests --gtest_filter='*Random*'
	ACCELERATE_CPP_TEST_COLLECTIVES=2000 $(EDITABLE)/tests/cpp/bridge_tests --gtest_filter='*Random*'
	$(MAKE) test-tensorflow
	$(MAKE) tsan
	ACCELERATE_CPP_TEST_COLLECTIVES=1000 build/tsan/tests/cpp/core_tests --gtest_filter='*Random*'
	$(MAKE) asan
	$(MAKE) fuzz SECONDS=60

$(XLA_VENV)/.requirements: requirements/xla.txt requirements/runtime.txt requirements/build.txt
	@.ci/system-packages $(PYTHON)
	@echo "==> creating $(XLA_VENV) with torch 2.9 and torch_xla (some minutes, 7 GB)"
	@$(PYTHON) -m venv $(XLA_VENV)
	@$(XLA_PIP) -r requirements/xla.txt
	@touch $@

$(XLA_VENV)/.built: $(XLA_VENV)/.requirements $(BUILD_INPUTS)
	@echo "==> compiling the C++ core for torch 2.9 (about 3 minutes on 2 cores)"
	@PATH="$(CURDIR)/$(XLA_VENV)/bin:$$PATH" $(XLA_PIP) --no-build-isolation --no-deps --config-settings=build-dir=build/xla --editable .
	@touch $@

test-xla: $(XLA_VENV)/.built ## train through torch_xla on CPUs, in an environment of its own
	$(XLA_VENV)/bin/python -m pytest tests/xla $(PYTEST_ARGS)

lint: $(VENV)/.requirements ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files --cached --others --exclude-standard '*.h' '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy python/accelerate_cpp build_backend
	cd python && lint-imports --config ../pyproject.toml --no-cache

format: $(VENV)/.requirements ## format Python and C++
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	git ls-files --cached --others --exclude-standard '*.h' '*.cpp' | xargs $(BIN)/clang-format -i

docs: build ## bring the table of what is refused, and the types of lazy names, up to date
	$(BIN)/python -c "$$UPDATE_REFUSALS"
	$(BIN)/python build_backend/stubs.py
	$(BIN)/python tests/architecture/structure_report.py --write

define UPDATE_REFUSALS
import pathlib, re
from accelerate_cpp.config.unsupported import markdown_table
page = pathlib.Path("docs/refusals.md")
begin, end = "<!-- unsupported: begin -->\n", "<!-- unsupported: end -->"
pattern = re.escape(begin) + ".*" + re.escape(end)
page.write_text(re.sub(pattern, lambda _: begin + markdown_table() + end, page.read_text(), flags=re.DOTALL))
endef
export UPDATE_REFUSALS

notebooks: build ## run the notebooks and store them with their outputs
	$(BIN)/python notebooks/execute.py

site: build ## build the documentation into out/site
	$(PIP_INSTALL) -r requirements/docs.txt
	$(SPHINX) . out/site

wheel: $(VENV)/.requirements ## build a wheel into dist/
	@.ci/system-packages $(PYTHON)
	@echo "==> compiling and packing (about 2 minutes on 2 cores)"
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

compile-only: $(VENV)/.created ## compile, without linking, against the headers of TORCH_VERSIONS
	@$(BIN)/python -m pip install --quiet -r requirements/build.txt
	.ci/compile-only $(TORCH_VERSIONS)

bench: build ## run the benchmarks; tables on the screen, figures and a plot in out/
	@mkdir -p out
	$(BIN)/python benchmarks/collectives.py --json out/collectives.json --plot out/collectives.png
	$(BIN)/python benchmarks/step.py --json out/step.json
	$(BIN)/python benchmarks/parallel.py --json out/parallel.json
	$(BIN)/python benchmarks/precision.py --processes 1 2 --json out/precision.json
	$(BIN)/python benchmarks/facade.py --json out/facade.json
	$(BIN)/python benchmarks/data.py --json out/data.json
	$(BIN)/python benchmarks/checkpoint.py --json out/checkpoint.json
	$(BIN)/python benchmarks/threads.py --json out/threads.json
	$(BIN)/python benchmarks/memory.py

clean: ## remove what was built (the environment stays)
	rm -rf build dist out $(VENV)/.built $(VENV)/.built-with-tests
