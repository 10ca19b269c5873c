// Decompresses packets of bursts to float32 values, the reverse of gw_compressor. A packet's number
// of values comes with its first beat, because the bursts alone do not tell the last values from
// none. README.md has the layout and the meaning of m_axis_tuser.
module gw_decompressor (
    input logic clk,
    input logic rst,

    input  logic [255:0] s_axis_tdata,
    input  logic [ 31:0] s_axis_tkeep,
    input  logic         s_axis_tlast,
    input  logic [ 15:0] s_axis_tuser,  // values of the packet, in its first beat
    input  logic         s_axis_tvalid,
    output logic         s_axis_tready,
    output logic [255:0] m_axis_tdata,
    output logic [ 31:0] m_axis_tkeep,
    output logic         m_axis_tlast,
    output logic [  3:0] m_axis_tuser,
    output logic         m_axis_tvalid,
    input  logic         m_axis_tready
);
    wire [271:0] bytes;
    wire [5:0] available, step_raw_size, take;
    wire [3:0] step_present;
    wire ended, step_raw, step_last, step_padding, taken, finished;
    wire [15:0] user;
    logic midway;  // the packet's first burst is done
    logic [15:0] rest;
    wire [15:0] values = midway ? rest : user;
    assign step_raw      = 1'b0;
    assign step_raw_size = 6'd0;
    assign step_present  = values > 16'd8 ? 4'd8 : values[3:0];
    assign step_last     = values <= 16'd8;
    assign step_padding  = 1'b0;
    gw_decompression_engine #(.USER_BITS(16)) engine (.*);

    always_ff @(posedge clk) begin
        if (rst) midway <= 1'b0;
        else if (taken) midway <= !finished;
        if (taken) rest <= values - 16'd8;
    end

    wire unused = &{1'b0, bytes, available, ended, take};
endmodule
