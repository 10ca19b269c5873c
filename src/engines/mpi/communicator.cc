#include "engines/mpi/communicator.h"

#include <atomic>
#include <string>

namespace gradwire::mpi {
namespace {

using Attached = std::shared_ptr<Communicator>;

int delete_attached(MPI_Comm, int, void* value, void*) {
  delete static_cast<Attached*>(value);
  return MPI_SUCCESS;
}

int make_key() {
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, delete_attached, &key, nullptr);
  return key;
}

// The number of a communicator whose rank 0 is this rank: its rank in MPI_COMM_WORLD, and how many
// such communicators it had before.
uint64_t next_number() {
  static std::atomic<uint64_t> count{0};
  int in_world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &in_world);
  return static_cast<uint64_t>(in_world) + (count++ << 24);
}

}  // namespace

Status check_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized != 0 && finalized == 0) return {};
  return {StatusCode::kInvalidArgument,
          finalized != 0 ? "MPI_Finalize was called already" : "MPI_Init was not called yet"};
}

Status check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {StatusCode::kPeerLost, std::string(call) + ": " + std::string(text, length)};
}

Result<std::shared_ptr<Communicator>> Communicator::attach(MPI_Comm user) {
  GW_RETURN_IF_ERROR(check_running());
  if (user == MPI_COMM_NULL) {
    return Status(StatusCode::kInvalidArgument, "the communicator is MPI_COMM_NULL");
  }
  int inter = 0;
  GW_MPI(MPI_Comm_test_inter, user, &inter);
  if (inter != 0) {
    return Status(StatusCode::kInvalidArgument,
                  "the communicator is an intercommunicator; its two groups have no common result");
  }
  static const int key = make_key();
  Attached* attached = nullptr;
  int found = 0;
  GW_MPI(MPI_Comm_get_attr, user, key, static_cast<void*>(&attached), &found);
  if (found != 0) return *attached;

  std::shared_ptr<Communicator> made(new Communicator);
  GW_MPI(MPI_Comm_dup, user, &made->handle_);
  MPI_Comm_set_errhandler(made->handle_, MPI_ERRORS_RETURN);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(made->handle_, &rank);
  MPI_Comm_size(made->handle_, &size);
  made->rank_ = static_cast<uint32_t>(rank);
  made->size_ = static_cast<uint32_t>(size);
  if (rank == 0) made->number_ = next_number();
  GW_MPI(MPI_Bcast, &made->number_, 1, MPI_UINT64_T, 0, made->handle_);
  GW_RETURN_IF_ERROR(made->find_machines());
  int* highest_tag = nullptr;
  int known = 0;
  MPI_Comm_get_attr(made->handle_, MPI_TAG_UB, static_cast<void*>(&highest_tag), &known);
  constexpr int kLeastHighestTag = 32767;  // guaranteed by the MPI standard
  made->tag_pairs_ = static_cast<uint32_t>(known != 0 ? *highest_tag : kLeastHighestTag) / 2;
  GW_MPI(MPI_Comm_set_attr, user, key, new Attached(made));
  return made;
}

Status Communicator::find_machines() {
  MPI_Comm machine = MPI_COMM_NULL;
  GW_MPI(MPI_Comm_split_type, handle_, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  uint32_t lowest = rank_;
  machines_.resize(size_);
  const int shared = MPI_Bcast(&lowest, 1, MPI_UINT32_T, 0, machine);
  MPI_Comm_free(&machine);
  GW_RETURN_IF_ERROR(check_mpi(shared, "MPI_Bcast"));
  GW_MPI(MPI_Allgather, &lowest, 1, MPI_UINT32_T, machines_.data(), 1, MPI_UINT32_T, handle_);
  return {};
}

Communicator::~Communicator() {
  if (handle_ != MPI_COMM_NULL && check_running().ok()) MPI_Comm_free(&handle_);
}

}  // namespace gradwire::mpi
