from spack.package import *


class Gradwire(CMakePackage):
    """Compresses what distributed training sends: the library for C++ and C, with compressed
    collectives over MPI.

    From a checkout: spack repo add packaging/spack && spack dev-build gradwire@main
    """

    license("Apache-2.0")
    version("main")

    variant("cuda", default=False, description="The codecs on a GPU")
    variant("mpi", default=True, description="Compressed collectives over MPI")
    variant("shared", default=True, description="A shared library")
    variant("tools", default=False, description="gradwire-perftest")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("highway@1.0.3:")
    depends_on("xxhash", type="build")
    depends_on("benchmark", when="+tools")
    depends_on("mpi", when="+mpi")
    depends_on("cuda@12:", when="+cuda")
    depends_on("googletest", type="test")
    conflicts("+tools", when="~mpi")
    conflicts("%gcc@:11", msg="C++20 needs GCC 12 or later")

    def cmake_args(self):
        return [
            self.define("GRADWIRE_BUNDLED", False),
            self.define("GRADWIRE_TESTS", self.run_tests),
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("GRADWIRE_BENCH", "tools"),
            self.define_from_variant("GRADWIRE_CUDA", "cuda"),
            self.define_from_variant("GRADWIRE_MPI", "mpi"),
        ]
