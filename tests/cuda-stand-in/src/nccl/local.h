// What a rank does by itself: checks of its buffers, and operations without another rank.
#pragma once

#include "task.h"

#include <vector>

namespace nccl_stand_in {

// Returns what is wrong with the buffers of an operation, by what is in use at its call, or nothing.
std::string problem_of_buffers(const Task& task, int rank, int ranks, int device);
// Whether the buffers can be accessed now.
bool are_buffers_open(const Task& task, int rank, int ranks);
// Fills buffers of receives that no send reads, so that nothing reads them before the data is there.
void poison_receives(const std::vector<Task>& tasks, int rank, int ranks);

// Returns what is wrong with sends of a rank to itself, which need as many receives that fit, or nothing.
std::string problem_of_own(const std::vector<Task>& tasks, int rank);
// Runs what a rank exchanges with itself; returns the other operations.
std::vector<Task> run_own_part(const std::vector<Task>& tasks, int rank, int ranks);

}  // namespace nccl_stand_in
